"""Several configurations over the same seeds, compared: `batch` runs them, `arms` reads them, `statistics` judges, and
`pages` writes it down. Runs of a user's own are read the same way."""
