"""Inputs and systems of the training benchmark."""
