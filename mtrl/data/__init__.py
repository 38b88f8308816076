"""From files to prompts: `open_dataset` reads and checks rows, `Sampler` draws prompts."""

from mtrl.data.dataset import Dataset, open_dataset
from mtrl.data.row_settings import BadRow, DataError, DataSettings, DataSource
from mtrl.data.sampler import Sampler
from mtrl.data.sources import RowList, open_sources

__all__ = [
    "BadRow",
    "DataError",
    "DataSettings",
    "DataSource",
    "Dataset",
    "RowList",
    "Sampler",
    "open_dataset",
    "open_sources",
]
