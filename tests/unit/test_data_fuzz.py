"""Two thousand mutated rows and files: each is used, or rejected with its file and row. No other error, no hang.
`python tests/soak/data_fuzz.py` tries any number."""

import logging

import pytest
from soak.data_fuzz import Fuzzer, mutated_arrow, mutated_lines, mutated_parquet, mutated_rows, tiny_encoder


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.mark.filterwarnings("ignore")  # Pillow and other libraries warn about damage
@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2, 3))])
def test_mutated_rows_and_images(seed, tmp_path):
    used, refused = mutated_rows(Fuzzer(seed), tmp_path, 275)
    assert used > 20 and refused > 100


@pytest.mark.filterwarnings("ignore")
def test_mutated_rows_with_the_encoder_of_a_family(tmp_path):
    used, refused = mutated_rows(Fuzzer(5), tmp_path, 150, tiny_encoder(tmp_path / "model"))
    assert used > 10 and refused > 50


@pytest.mark.filterwarnings("ignore")
def test_mutated_lines(tmp_path):
    used, refused = mutated_lines(Fuzzer(100), tmp_path, 450)
    assert used > 10 and refused > 100


@pytest.mark.slow  # 3 s
@pytest.mark.filterwarnings("ignore")
def test_mutated_parquet_files(tmp_path):
    opened, _ = mutated_parquet(Fuzzer(200), tmp_path, 150)
    assert opened > 10


@pytest.mark.slow  # 2 s
@pytest.mark.filterwarnings("ignore")
def test_mutated_arrow_files(tmp_path):
    opened, _ = mutated_arrow(Fuzzer(300), tmp_path, 150)
    assert opened > 10
