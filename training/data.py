"""Packed batches: several documents in a row, attention kept inside each."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of one document, and where its part that carries loss begins."""

    ids: list[int]
    loss_from: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of packed documents, each tensor [rows, length].

    `documents` numbers the document of each token within its row (-1: padding), `positions` count
    from 0 in each document, `loss_mask` is true on the tokens to be predicted.
    """

    ids: Tensor
    positions: Tensor
    documents: Tensor
    loss_mask: Tensor


def pack(documents: Iterator[Document], rows: int, length: int) -> Iterator[Batch]:
    """Fill rows first fit from an endless stream; a document longer than a row is left out.

    A document that fits no row of the batch opens the next batch, so none is cut.
    """
    waiting: Document | None = None
    while True:
        filled: list[list[Document]] = [[] for _ in range(rows)]
        space = [length] * rows
        while True:
            document = waiting or next(documents, None)
            waiting = None
            if document is None:
                return
            if len(document.ids) > length:
                continue
            fits = [r for r in range(rows) if space[r] >= len(document.ids)]
            if not fits:
                waiting = document
                break
            filled[fits[0]].append(document)
            space[fits[0]] -= len(document.ids)
        yield collate(filled, length)


def collate(rows: list[list[Document]], length: int) -> Batch:
    """The batch of the given documents, row by row, padded to `length`."""
    shape = (len(rows), length)
    ids = torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    numbers = torch.full(shape, -1)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for r, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents):
            end = start + len(document.ids)
            ids[r, start:end] = torch.tensor(document.ids)
            positions[r, start:end] = torch.arange(end - start)
            numbers[r, start:end] = number
            loss_mask[r, start + document.loss_from : end] = True
            start = end
    return Batch(ids=ids, positions=positions, documents=numbers, loss_mask=loss_mask)


def token_documents(texts: Iterator[tuple[str, str]], tokenizer: object) -> Iterator[Document]:
    """Tokenise (context, continuation) pairs; the loss is on the continuation."""
    encode = tokenizer.encode  # type: ignore[attr-defined]
    for context, continuation in texts:
        head = encode(context, add_special_tokens=False).ids
        yield Document(
            ids=head + encode(continuation, add_special_tokens=False).ids, loss_from=len(head)
        )
