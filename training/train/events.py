"""Scalars for TensorBoard, written without it: event files are length-prefixed protobuf records.

Format: TFRecord (length, masked CRC32C of the length, data, masked CRC32C of the data) around
`tensorflow.Event` messages. Only scalars are written, so that four fields of the message suffice.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC32C = _table()


def masked_crc(data: bytes) -> int:
    """CRC32C (Castagnoli), rotated and offset as TFRecord wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data)))
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def event(when: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """An Event: wall_time (1), step (2), summary (5) of values with tag (1), simple_value (2)."""
    values = b"".join(
        _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
        for tag, value in scalars.items()
    )
    return b"\x09" + struct.pack("<d", when) + b"\x10" + _varint(step) + _field(5, values)


class EventFile:
    """Appends scalars to an event file of its own in `folder`; earlier files stay."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "ab")  # noqa: SIM115 - open for the run's length
        version = b"\x09" + struct.pack("<d", now) + _field(3, b"brain.Event:2")
        self._file.write(record(version))
        self._file.flush()

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Scalars by tag, at update `step`."""
        self._file.write(record(event(time.time(), step, scalars)))
        self._file.flush()

    def close(self) -> None:
        """No more will be added."""
        self._file.close()
