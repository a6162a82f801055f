"""Who may do what, and the record of what was done: roles, tokens, sessions and the audit record."""
