"""The HTTP server: OpenAI's routes over banks, uploads, and a page. It needs the extra `serve`."""
