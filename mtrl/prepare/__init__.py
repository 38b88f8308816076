"""Prepare public datasets for training: one schema, Parquet shards, a dataset card and a contact sheet."""
