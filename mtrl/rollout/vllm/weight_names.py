"""Weights under the names that vLLM loads, where transformers has others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from mtrl.models.state_dicts import Form, weight_forms


class RenamedWeights(Mapping[str, Tensor]):
    """`beginnings`: what names begin with, and what is put in its place. A tensor that is made on access still is."""

    def __init__(self, weights: Mapping[str, Tensor], beginnings: Mapping[str, str]) -> None:
        self._weights, self._forms = weights, weight_forms(weights)
        self._names = {rename(name, beginnings): name for name in weights}

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._names[name]]

    def form(self, name: str) -> Form:
        return self._forms[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def rename(name: str, beginnings: Mapping[str, str]) -> str:
    for old, new in beginnings.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
