"""Stay a member of a Faust consumer group."""

import asyncio
import logging
from collections.abc import Callable

from aiokafka.errors import KafkaError

from forebay.live.faust_batches import BatchedApp
from forebay.processes.notices import announce
from forebay.processes.shutdown import CLOSE_S, ending_within
from forebay.transport.base import LogError, LogUnavailable
from forebay.transport.kafka.errors import explain, is_transient

logger = logging.getLogger(__name__)

REJOIN_S = 1.0
LEAVE_S = 10.0  # seconds; Faust's consumer commits and leaves within one second if the broker responds


async def stay_member(name: str, new_app: Callable[[], BatchedApp], on_left: Callable[[], None]) -> None:
    """Be a member of the group of an app until cancelled, and join it again if the membership breaks.

    `name` names this process in messages. `on_left` is called when the membership broke. Raises LogError if Kafka does
    not let this program join.
    """
    while True:
        app = new_app()
        app.finalize()
        try:
            await app.start()
            announce(f"{name} is a member of {app.conf.id}")
            await app.until_broken()
        except LogUnavailable as error:
            logger.warning("%s; joining again", error)
        except (KafkaError, OSError) as error:
            text = f"{name} cannot join {app.conf.id}: {explain(error)}"
            if not is_transient(error):
                raise LogError(text) from error
            logger.warning("%s; trying again", text)
        finally:
            with ending_within(LEAVE_S + CLOSE_S, f"its work ended, because it cannot leave the group {app.conf.id}"):
                await app.stop()
        on_left()
        await asyncio.sleep(REJOIN_S)
