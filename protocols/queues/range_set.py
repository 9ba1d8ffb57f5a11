"""A set of message numbers, kept as ranges: numbers that are done out of order take little memory."""

from bisect import bisect_right
from collections.abc import Iterable


class Ranges:
    """Numbers, as inclusive ranges in rising order that do not touch."""

    __slots__ = ("_highs", "_lows", "items")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """``ranges``: in rising order, not touching."""
        self._lows: list[int] = []
        self._highs: list[int] = []
        self.items: int = 0
        """The number of numbers."""
        for low, high in ranges:
            self._lows.append(low)
            self._highs.append(high)
            self.items += high - low + 1

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._lows, number)
        return bool(at) and number <= self._highs[at - 1]

    def __bool__(self) -> bool:
        return bool(self._lows)

    @property
    def last(self) -> int:
        """The highest number; 0 when there is none."""
        return self._highs[-1] if self._highs else 0

    def add(self, number: int) -> bool:
        """Add a number; return False when it was there."""
        lows, highs = self._lows, self._highs
        at = bisect_right(lows, number)
        if at and number <= highs[at - 1]:
            return False
        self.items += 1
        joins_before = bool(at) and highs[at - 1] == number - 1
        joins_after = at < len(lows) and lows[at] == number + 1
        if joins_before and joins_after:
            highs[at - 1] = highs[at]
            del lows[at], highs[at]
        elif joins_before:
            highs[at - 1] = number
        elif joins_after:
            lows[at] = number
        else:
            lows.insert(at, number)
            highs.insert(at, number)
        return True

    def take_after(self, number: int) -> int:
        """Remove the run of numbers that follows on ``number`` without a gap; return its last one, or ``number``."""
        if not self._lows or self._lows[0] != number + 1:
            return number
        self.items -= self._highs[0] - number
        del self._lows[0]
        return self._highs.pop(0)

    def drop_up_to(self, number: int) -> None:
        """Forget everything up to a number."""
        lows, highs = self._lows, self._highs
        while lows and lows[0] <= number:
            if highs[0] > number:
                self.items -= number - lows[0] + 1
                lows[0] = number + 1
                return
            self.items -= highs[0] - lows[0] + 1
            del lows[0], highs[0]

    def clear(self) -> None:
        """Forget everything."""
        self._lows.clear()
        self._highs.clear()
        self.items = 0

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._lows)


def as_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return rising numbers as inclusive ranges that do not touch."""
    found: list[tuple[int, int]] = []
    low = high = 0
    for number in numbers:
        if found and number <= high + 1:
            if number > high:
                high = number
                found[-1] = (low, high)
        else:
            low = high = number
            found.append((low, high))
    return found


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join inclusive ranges, in rising order of their lows, that touch or overlap."""
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        if found and low <= found[-1][1] + 1:
            if high > found[-1][1]:
                found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found
