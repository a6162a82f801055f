"""Access: tokens and sessions, and the record of what was done by whom."""
