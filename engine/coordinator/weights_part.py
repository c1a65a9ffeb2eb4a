"""Answer with a part of a weight file: read from the disk in pieces, so the coordinator goes on with other calls."""

import asyncio
import os
import re
from pathlib import Path

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES = 1 << 20
"""Bytes of a read and of a write to the connection."""


class WeightsPart(Response):
    """The bytes of a file from the asked one on. The file stays readable if its name is removed meanwhile."""

    def __init__(self, file: Path, byte_range: str) -> None:
        """`byte_range`: the header Range, `bytes=FIRST-`; empty: from the first byte on.

        Raises FileNotFoundError, or ValueError for another kind of range or a first byte behind the end.
        """
        super().__init__()
        match = re.fullmatch(r"(?:bytes=(\d+)-)?", byte_range)
        if match is None:
            raise ValueError(f"the range is {byte_range!r}; use bytes=FIRST-")
        first = int(match[1] or 0)
        self._file = file.open("rb", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        if first >= size:
            self._file.close()
            raise ValueError(f"the range begins at byte {first}; the weights have {size} bytes")
        self._at, self._size = first, size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            headers = [
                (b"content-type", b"application/octet-stream"),
                (b"content-length", b"%d" % (self._size - self._at)),
                (b"content-range", b"bytes %d-%d/%d" % (self._at, self._size - 1, self._size)),
            ]
            await send({"type": "http.response.start", "status": 206, "headers": headers})
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                while self._at < self._size and not gone.done():
                    piece = await asyncio.to_thread(
                        os.pread, self._file.fileno(), min(PIECE_BYTES, self._size - self._at), self._at
                    )
                    self._at += len(piece)
                    more = bool(piece) and self._at < self._size
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
            finally:
                gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
