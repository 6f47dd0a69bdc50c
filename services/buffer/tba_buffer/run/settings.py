"""Live settings: learning rate, beta, m, sampling temperature and the interval of evaluations, while the run continues.

    change    PATCH -> the whole recipe is checked with the new values -> settings.lua: revision, values, a line of the
              audit, in one call
    use       read_run.lua reads the revision with every snapshot of the run; `at` returns the values of that revision:
              draws use m, leases the sampling temperature. The trainer gets the revision with every batch and ack,
              and asks for the values when the revision has changed.

Redis is the source of truth; this process keeps a copy of one revision.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from tba.api import MAX_CHANGES_PER_PAGE, SettingsInfo, SettingsRequest
from tba.api.run import Role, SettingsAudit
from tba.config import LIVE_NAMES, LiveName, LiveSettings, Recipe, Schedule, parse_live, with_live
from tba.errors import ConfigError, ConflictError, UnavailableError
from tba_buffer.run.lineage import fenced
from tba_buffer.storage.context import Context, RunHash, read_lines
from tba_buffer.storage.keys import Keys
from tba_buffer.storage.redis_client import BytesRedis, redis_errors

ATTEMPTS = 8
"""How often a change is checked again because others changed the settings meanwhile."""
NOT_CHECKED = -1
"""Sent instead of a revision when the new values were not checked: the script then only answers a repeated request, and
makes no change."""


@dataclass(frozen=True, slots=True)
class SettingsRevision:
    """The live settings of one revision, and the recipe with these settings applied."""

    revision: int
    settings: LiveSettings
    recipe: Recipe

    def now(self, step: int) -> dict[LiveName, float]:
        """Return the values of the live settings for the step after `step`, by name."""
        values = LiveSettings.of_recipe(self.recipe).changed()
        return {name: value.at(step) if isinstance(value, Schedule) else value for name, value in values.items()}


async def read_settings(redis: BytesRedis, keys: Keys, recipe: Recipe) -> SettingsRevision:
    """Read the current live settings from Redis.

    Raises:
        ConfigError: the live settings cannot be read, or contradict the recipe.
    """
    with redis_errors("read the live settings"):
        raw = await redis.hgetall(keys.settings)
    fields = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}
    try:
        revision = int(fields.get("revision", 0))
        settings = parse_live(
            {name: json.loads(fields[f"value:{name}"]) for name in LIVE_NAMES if f"value:{name}" in fields}
        )
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            f"run {recipe.run.name!r} has live settings (revision {fields.get('revision')}) that this release of tba "
            f"cannot read: {error}; restore Redis from a copy, or run the release that wrote them and reset them there "
            "(`tba set KEY=recipe`)"
        ) from None
    try:
        return SettingsRevision(revision, settings, with_live(recipe, settings))
    except ConfigError as error:
        raise ConfigError(
            f"run {recipe.run.name!r} has live settings (revision {revision}) that do not go with this recipe: "
            f"{error}; start with the recipe that they were made for, and reset them there first "
            "(`tba set KEY=recipe`)"
        ) from None


class Settings:
    """Reads and changes the live settings."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._current = SettingsRevision(0, LiveSettings(), context.recipe)
        self._reading = asyncio.Lock()

    @property
    def revision(self) -> int:
        """The newest revision that this process knows."""
        return self._current.revision

    async def load(self) -> SettingsRevision:
        """Read the current settings from Redis, keep them, and return them.

        Raises:
            ConfigError: the live settings cannot be read, or contradict the recipe of this process.
        """
        async with self._reading:  # one at a time: a late answer would bring an older revision back
            self._current = await read_settings(self._context.redis, self._context.keys, self._context.recipe)
            return self._current

    async def at(self, revision: int) -> SettingsRevision:
        """Return the settings of `revision`, or newer ones. Read them from Redis if another revision is cached.

        Raises:
            UnavailableError: Redis did not answer, or the live settings in it cannot be used.
        """
        if revision == self._current.revision:
            return self._current
        try:
            return await self.load()
        except ConfigError as error:  # not the fault of the searcher or trainer that asks: it is to try again
            raise UnavailableError(str(error)) from None

    async def change(self, request: SettingsRequest, role: Role) -> SettingsInfo:
        """Change some settings. A request id that made a change before changes nothing.

        Returns:
            The settings now, and only the change that this request made.

        Raises:
            ConfigError: a value is not possible, by itself or with the rest of the recipe.
            FencedError: a newer lineage owns the run.
            ConflictError: the run is done, `request.revision` is not the newest one, or others keep changing the
                settings.
            SupersededError: this buffer process does not own the run.
        """
        given = {name: getattr(request.settings, name) for name in LIVE_NAMES}
        given = {name: value for name, value in given.items() if name in request.settings.model_fields_set}
        stored = {
            name: json.dumps(value.model_dump() if isinstance(value, Schedule) else value)
            for name, value in given.items()
        }
        for _ in range(ATTEMPTS):
            current = await self.load()
            # A change for an older revision is sent all the same, unchecked: the script makes no new one, but
            # answers with the change that this request id has made before.
            moved = request.revision not in (None, current.revision)
            # checked here and not in the script; the script refuses when others changed the settings meanwhile
            if not moved:
                with_live(self._context.recipe, current.settings.model_copy(update=given))
            reply = await self._context.scripts.run(
                "settings",
                request_id=request.request_id,
                token=request.token or None,
                revision=NOT_CHECKED if moved else current.revision,
                now_s=self._context.clock(),
                role=role,
                reason=request.reason,
                values=[part for pair in stored.items() for part in pair],
            )
            match reply[0]:
                case b"fenced":
                    raise fenced("a change of live settings")
                case b"done":
                    raise ConflictError("the run is done: its settings cannot change any more")
                case b"ok":
                    return await self.info(after=int(reply[1]) - 1, limit=1)
            if moved:
                raise ConflictError(
                    f"the settings are at revision {current.revision}, and the change was made for revision "
                    f"{request.revision}: read them again"
                )
        raise ConflictError(
            f"the settings were changed by others {ATTEMPTS} times while this change was checked; send it again"
        )

    async def info(self, *, after: int = 0, limit: int = MAX_CHANGES_PER_PAGE) -> SettingsInfo:
        """Return the current settings, and at most `limit` changes after the revision `after`, oldest first."""
        context = self._context
        current, run = await self.load(), await RunHash.read(context)
        key = context.keys.settings_changes
        changes, more = await read_lines(context, key, SettingsAudit, after=after, limit=limit)
        return SettingsInfo(
            revision=current.revision,
            settings=current.settings,
            recipe=LiveSettings.of_recipe(context.recipe),
            now=current.now(run.step),
            changes=changes,
            next=more,
        )
