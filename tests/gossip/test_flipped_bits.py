"""One bit of a message that changes on its way between two ranks: an error that names the sender."""

import pytest
from gossip.networks import OUTER, ROWS, Row, Trained
from noise import Noisy, flip, places

from dgc.comm.lockstep import LockstepTransport

pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.mark.parametrize("row", [*ROWS, *OUTER], ids=lambda row: row.name)
def test_every_algorithm_notices_a_flipped_bit(row: Row) -> None:
    """In the first and the last message of a rank, which may be settings. Some algorithms only reduce.

    All places of the first algorithm's messages, three of the others': the envelope is the same.
    """

    def body(transport: LockstepTransport) -> None:
        own = Trained(transport, row.make())
        for _ in range(6):
            own.step()
        own.optimizer.synchronize_messages()

    clean, unnoticed = Noisy(4), []
    clean.run(body)
    for number in {0, len(clean.messages) - 1} if clean.messages else ():
        for byte in places(clean.messages[number])[:: 1 if row is ROWS[0] else 4]:
            try:
                Noisy(4, None, flip(byte), number).run(body)
            except RuntimeError as error:
                assert str(error).startswith("rank 1 sent ") and "wrong checksum" in str(error), error
            else:
                unnoticed.append(f"message {number}, byte {byte} of {clean.messages[number]}")
    assert unnoticed == []
