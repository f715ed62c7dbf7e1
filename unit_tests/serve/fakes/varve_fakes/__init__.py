"""Children and models for tests of processes; found through PYTHONPATH, as children are."""
