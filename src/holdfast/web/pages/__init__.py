"""Pages for people: a table of pages, a template for each, and the files that they load. Nothing is inline."""
