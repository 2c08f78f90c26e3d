"""An HTTP server over the engine that speaks OpenAI's API. Needs the extra `serve`; nothing else imports it."""
