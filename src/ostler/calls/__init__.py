"""Calls to warm models: what a user declares, and the process in which a model runs."""
