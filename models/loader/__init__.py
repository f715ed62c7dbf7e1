"""Loads a rank's part of a model's weights and builds the model."""

from models.loader.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
