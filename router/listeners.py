"""Who listens on one worker's session: its requests, and the samples of each by the number that they have there."""

from typing import Any

from headrace.v1 import worker_pb2
from router.mailbox import Mailbox


class Listeners:
    """Owned by one session. A number is never given twice, so that a late token of one that left finds nobody."""

    def __init__(self) -> None:
        self._mailboxes: dict[str, Mailbox[Any]] = {}
        self._numbers: dict[str, range] = {}
        self._submitted_as: dict[str, int] = {}  # attempts
        self._samples: dict[int, tuple[Mailbox[Any], int]] = {}
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._mailboxes)

    def add(self, request_id: str, num_samples: int, mailbox: Mailbox[Any]) -> int:
        """The number of its sample 0; sample i has that plus i."""
        self.remove(request_id)
        first = self._next_number
        self._next_number += num_samples
        self._mailboxes[request_id] = mailbox
        self._submitted_as[request_id] = mailbox.key.attempt
        self._numbers[request_id] = range(first, self._next_number)
        self._samples.update((first + index, (mailbox, index)) for index in range(num_samples))
        return first

    def remove(self, request_id: str) -> Mailbox[Any] | None:
        for number in self._numbers.pop(request_id, ()):
            del self._samples[number]
        self._submitted_as.pop(request_id, None)
        return self._mailboxes.pop(request_id, None)

    def clear(self) -> list[Mailbox[Any]]:
        """Removes all; returns them."""
        mailboxes = list(self._mailboxes.values())
        for listeners in (self._mailboxes, self._numbers, self._submitted_as, self._samples):
            listeners.clear()
        return mailboxes

    def find(self, key: worker_pb2.RequestKey) -> Mailbox[Any] | None:
        """The request's, if it is the attempt that counts."""
        mailbox = self._mailboxes.get(key.request_id)
        return mailbox if mailbox is not None and mailbox.key.attempt == key.attempt else None

    def computed(self, key: worker_pb2.RequestKey) -> Mailbox[Any] | None:
        """The request's whose tokens these are: of the attempt that was submitted here, or of what it became. A worker that
        waited too long for another prefill worker computes alone, under the name that it knows."""
        mailbox = self._mailboxes.get(key.request_id)
        if mailbox is None or not self._submitted_as[key.request_id] <= key.attempt <= mailbox.key.attempt:
            return None
        return mailbox

    def sample(self, number: int) -> tuple[Mailbox[Any], int] | None:
        """The request's, and which of its samples that is."""
        return self._samples.get(number)
