"""Operations of a Qwen3.5 step. One folder an operation; its `reference` is the definition."""
