"""OpenAI's own client against the server: answers are the engine's, whole or in pieces."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gdnjax.engine import Handle
from gdnjax.generation import SamplingParams
from tests.generation.small import STOP_ID
from tests.server.serving import REQUESTS, Running, make_engine, model

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT = "the thé"
OTHER = [5, 9, 2, 200, 31, 7, 7]
FREE: dict[str, Any] = dict(extra_body={"ignore_eos": True})
SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=7)


def engine_says(prompt: Any, count: int, sampling: SamplingParams | None = None, **more: Any) -> Handle:
    """What a lone request gets from an engine without a server."""
    engine = make_engine()
    handle = engine.submit(prompt, count, sampling, **({"stop_ids": ()} | more))
    engine.run()
    return handle


def test_a_completion_is_what_the_engine_gives(client: openai.OpenAI) -> None:
    wanted = engine_says(PROMPT, 12)
    answer = client.completions.create(model="small", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=0, **FREE)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (wanted.text, "length", 0)
    assert choice.logprobs is not None and choice.logprobs.text_offset is not None
    assert choice.logprobs.token_logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
    tokenizer = model().tokenizer
    assert tokenizer is not None
    assert choice.logprobs.tokens == [tokenizer.decode([token], skip_control=False) for token in wanted.tokens]
    assert choice.logprobs.text_offset == [len(tokenizer.stream().push(wanted.tokens[:i])) for i in range(12)]
    assert answer.usage is not None and answer.usage.total_tokens == len(wanted.prompt) + 12
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(wanted.prompt), 12)
    assert (answer.object, answer.model) == ("text_completion", "small")


def test_a_stream_joins_to_the_same_text(client: openai.OpenAI) -> None:
    wanted = engine_says(PROMPT, 12)
    chunks = list(
        client.completions.create(
            model="small",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            logprobs=0,
            stream=True,
            stream_options={"include_usage": True},
            **FREE,
        )
    )
    *pieces, last = chunks
    assert "".join(piece.choices[0].text for piece in pieces) == wanted.text
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    scores = [piece.choices[0].logprobs for piece in pieces[:-1]]
    found = [x for score in scores if score is not None for x in score.token_logprobs or []]
    assert found == pytest.approx(wanted.logprobs, abs=1e-3)
    offsets = [x for score in scores if score is not None for x in score.text_offset or []]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] > 0
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_prompts_and_choices(client: openai.OpenAI) -> None:
    prompts = [OTHER, [17]]
    answer = client.completions.create(
        model="small", prompt=prompts, n=2, max_tokens=6, seed=7, temperature=0.9, **top_k(40)
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        sampling = SamplingParams(temperature=0.9, top_k=40, seed=7 + choice.index % 2)
        assert choice.text == engine_says(prompts[choice.index // 2], 6, sampling).text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(OTHER) + 1
    assert answer.usage.completion_tokens == 24


def top_k(k: int) -> dict[str, Any]:
    return {"extra_body": {"top_k": k, "ignore_eos": True}}


def test_seeds(client: openai.OpenAI) -> None:
    def text(**seed: Any) -> str:
        more = top_k(40)
        answer = client.completions.create(model="small", prompt=PROMPT, max_tokens=20, temperature=1.5, **more, **seed)
        return answer.choices[0].text

    assert text(seed=7) == text(seed=7) != text(seed=8)
    assert text() != text()  # a seed of its own
    assert text(seed=-1) == text(seed=2**32 - 1)


def test_stops(client: openai.OpenAI) -> None:
    free = engine_says(PROMPT, 20)
    assert free.text is not None
    cut = free.text[6:9]
    answer = client.completions.create(
        model="small", prompt=PROMPT, max_tokens=20, temperature=0, stop=["never there", cut], **FREE
    )
    assert answer.choices[0].text == free.text[: free.text.index(cut)]
    assert answer.choices[0].finish_reason == "stop"
    by_id = {"extra_body": {"ignore_eos": True, "stop_token_ids": [free.tokens[5]]}}
    answer = client.completions.create(model="small", prompt=PROMPT, max_tokens=20, temperature=0, **by_id)
    assert answer.usage is not None and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == free.tokens.index(free.tokens[5]) + 1
    # 16 tokens where nothing is said, as OpenAI has it
    answer = client.completions.create(model="small", prompt=PROMPT, temperature=0, **FREE)
    assert answer.choices[0].text == engine_says(PROMPT, 16).text


MESSAGES: Any = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]


def test_chat(client: openai.OpenAI) -> None:
    wanted = engine_says(f"a\n{PROMPT}\n", 64, stop_ids=[STOP_ID])
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, temperature=0, logprobs=True, extra_body={"stop_token_ids": [STOP_ID]}
    )
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.message.tool_calls) == (wanted.text, "assistant", None)
    assert choice.finish_reason == wanted.finish_reason
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [c.logprob for c in choice.logprobs.content] == pytest.approx(wanted.logprobs, abs=1e-3)
    joined = b"".join(bytes(c.bytes or []) for c in choice.logprobs.content)
    assert wanted.text is not None and joined.decode("utf-8", "replace").startswith(wanted.text)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(wanted.prompt)
    assert answer.object == "chat.completion"


def test_chat_in_pieces_of_several_choices(client: openai.OpenAI) -> None:
    wanted = engine_says(f"a\n{PROMPT}\nadd\n", 12)
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
    chunks = list(
        client.chat.completions.create(
            model="small",
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=12,
            logprobs=True,
            n=2,
            tools=[tool],
            stream=True,
            **FREE,
        )
    )
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "length"
        assert "".join(choice.delta.content or "" for choice in mine) == wanted.text
        scores = [x.logprob for choice in mine if choice.logprobs for x in choice.logprobs.content or []]
        assert scores == pytest.approx(wanted.logprobs, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_think_block_that_the_template_opened(client: openai.OpenAI, stream: bool) -> None:
    # The model never closes it: all is reasoning, though no tag comes.
    wanted = engine_says(f"a\n{PROMPT}\n<think>\n", 12)
    arguments: dict[str, Any] = dict(model="small", messages=MESSAGES, temperature=0, max_tokens=12, stream=stream)
    body = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(**arguments, extra_body=body)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        reasoning, content = answer.choices[0].message.reasoning_content, answer.choices[0].message.content
    assert wanted.text is not None and (reasoning, content) == (wanted.text.lstrip(), "")


def test_a_prefix_that_was_read_before(client: openai.OpenAI) -> None:
    prompt = [int(i) for i in range(100, 140)]
    for cached in (0, 32):
        answer = client.completions.create(model="small", prompt=prompt, max_tokens=2, temperature=0)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == cached


def test_models(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert (listed.id, listed.owned_by) == ("small", "gdnjax")
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="model = 'other'; this server has 'small'"):
        client.models.retrieve("other")


def test_health_and_metrics(server: Running, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        families = text_string_to_metric_families(server.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return {s.name + "".join(f"/{v}" for v in s.labels.values()): s.value for s in samples}

    before = read()
    client.completions.create(model="small", prompt=[17], max_tokens=9, temperature=0, **FREE)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="small", prompt=[], max_tokens=9)
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["gdnjax_generated_tokens_total"] == 9 and grown["gdnjax_prompt_tokens_total"] == 1
    assert grown["gdnjax_requests_finished_total/length"] == 1 and grown["gdnjax_requests_refused_total/400"] == 1
    assert grown["gdnjax_time_to_first_token_seconds_count"] == 1
    assert grown["gdnjax_inter_token_latency_seconds_count"] == 8
    assert after["gdnjax_requests_running"] == 0
    assert after["gdnjax_requests_free"] == after["gdnjax_requests_limit"] == REQUESTS
    assert after["gdnjax_kv_pages_limit"] == server.engine.pool.pages.count
    health = server.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "error": None})
