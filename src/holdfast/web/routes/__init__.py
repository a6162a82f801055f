"""The routes of the HTTP API: a file for each noun, with its endpoints and its table."""
