"""The memory store: the reference that the others have to agree with."""
