"""Public datasets made ready for training: one schema, shards of Parquet, a card and a sheet of samples."""
