"""The read model: what commands, the HTTP API and pages ask the store. A file for each noun; `model` joins them."""
