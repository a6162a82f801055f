"""A World for Workflow DevKit: the storage, queue and streams on which TypeScript workflows run."""
