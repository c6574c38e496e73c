"""One file a table of results: `run` fills what is missing, `table` renders what is committed."""
