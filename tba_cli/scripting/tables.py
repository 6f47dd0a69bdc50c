"""What a run gives in bulk: tables of columns, and listings that are read page by page, both without pandas.

pandas and pyarrow are imported where they are asked for.
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tba.api import RolloutInfo, RolloutOrder
from tba.clients import BufferClient
from tba.clients.run_reader import RolloutFilters
from tba.errors import ConfigError
from tba.fields import StrictModel

if TYPE_CHECKING:
    import pandas
    import pyarrow

M = TypeVar("M", bound=StrictModel)
MAX_PER_PAGE = 100
EXTRA = "tba[data]"


def optional(module: str, *, needed_by: str) -> Any:
    """Import a module that tba itself does not need.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ConfigError(f"{needed_by} needs {error.name}, which is not installed: pip install '{EXTRA}'") from None


class Table:
    """Columns of the same length; iterated, it gives the rows, and `len` is their number.

    Examples:
        >>> table = run.metrics()
        >>> table["loss"][-1]  # None: unknown
        >>> for row in table:
        ...     print(row["step"], row["loss"])
    """

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._columns = dict(columns)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self._columns.values()), []))

    def __getitem__(self, name: str) -> list[Any]:
        """Return the values of a column.

        Raises:
            KeyError: there is no such column.
        """
        if name not in self._columns:
            raise KeyError(f"no column {name!r}; there are {', '.join(self._columns)}")
        return self._columns[name]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows."""
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def __repr__(self) -> str:
        """Return its size and the names of its columns."""
        return f"<Table of {len(self)} rows: {', '.join(self._columns)}>"

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        return optional("pandas", needed_by="to_pandas()").DataFrame(self._columns)


class Listing(Generic[M]):
    """Items that are read from the run, page by page, each time that it is iterated; it knows no length.

    Args:
        read: begins a reading.

    Examples:
        >>> for line in run.ledger():
        ...     print(line.lineage)
    """

    def __init__(self, read: Callable[[], Iterator[M]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[M]:
        """Yield all items."""
        return self._read()

    def head(self, n: int = 5) -> list[M]:
        """Return the first items; no further page is read.

        Args:
            n: their number.
        """
        return list(itertools.islice(self._read(), n))

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row per item.

        Raises:
            ConfigError: pandas is not installed.
        """
        frame = optional("pandas", needed_by="to_pandas()").DataFrame
        return frame([item.model_dump(mode="json") for item in self._read()])


class Rollouts(Listing[RolloutInfo]):
    """The stored rollouts that match.

    Args:
        client: called for each reading.
        order: of the iteration.
        text_chars: longer texts are cut (`response_text_cut`) where they are iterated, never in tables.
        filters: as `tba rollouts list` has them.

    Examples:
        >>> frame = run.rollouts(status="scored").to_pandas(tokens=True)
    """

    def __init__(
        self, client: Callable[[], BufferClient], *, order: RolloutOrder, text_chars: int, filters: RolloutFilters
    ) -> None:
        super().__init__(self._pages)
        self._client, self._text_chars, self._filters = client, text_chars, filters
        self._order: RolloutOrder = order

    def to_arrow(self, *, tokens: bool = False) -> pyarrow.Table:
        """Return the Parquet export of the run: whole texts, no limit of rows, the oldest first.

        Args:
            tokens: also columns of tokens and log-probs.

        Raises:
            ConfigError: pyarrow is not installed here, or another order was asked for.
            NotInstalledError: pyarrow is not installed in the service.
        """
        parquet = optional("pyarrow.parquet", needed_by="to_arrow()")
        if self._order != "oldest":
            raise ConfigError(
                f"tables of rollouts have the oldest first, and this listing has order={self._order!r}; leave it out "
                "and sort the table, for example by its column reward"
            )
        with tempfile.TemporaryDirectory(prefix="tba-rollouts-") as place:
            path = Path(place) / "rollouts.parquet"
            self._client().export_rollouts(path, tokens=tokens, **self._filters)
            return parquet.read_table(path)

    def to_pandas(self, *, tokens: bool = False) -> pandas.DataFrame:
        """Return `to_arrow` as a data frame.

        Args:
            tokens: also columns of tokens and log-probs.

        Raises:
            ConfigError: pandas or pyarrow is not installed here, or another order was asked for.
            NotInstalledError: pyarrow is not installed in the service.
        """
        optional("pandas", needed_by="to_pandas()")
        return self.to_arrow(tokens=tokens).to_pandas()

    def _pages(self) -> Iterator[RolloutInfo]:
        cursor: str | None = None
        while True:
            page = self._client().list_rollouts(
                order=self._order, limit=MAX_PER_PAGE, cursor=cursor, text_chars=self._text_chars, **self._filters
            )
            yield from page.rollouts
            cursor = page.next
            if cursor is None:
                return
