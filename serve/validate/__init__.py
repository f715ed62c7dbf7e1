"""`varve cache validate`: whether a model's states, as this engine keeps them, give back what they were."""
