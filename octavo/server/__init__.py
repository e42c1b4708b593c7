"""The OpenAI-compatible HTTP server: `app` (ASGI), `driver` (the engine's thread), `serve`."""
