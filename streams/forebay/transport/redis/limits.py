"""Implement the port `LimitStore` on Redis. One script per call counts by the server's clock.

Keys: `<namespace>:limits:<key id>`, packed counts of one API key, and a hash `<namespace>:limit-ingresses` of the last
second in which each ingress has called.
"""

import redis.asyncio as redis
from redis.exceptions import RedisError

from forebay.transport.limits import DAY_S, LAPSE_S, MEMBER_S, WINDOW_S, Ask, Known, LimitsUnavailable, Reply

KEPT_S = 2 * WINDOW_S  # counts of a key without a budget
BUDGET_KEPT_S = 33 * DAY_S

NOW = "local time = redis.call('TIME') local now, now_us = tonumber(time[1]), time[1] * 1000000 + time[2]"
# The steps are those of `KeyCounts`, and their names, too.
TAKE = f"""
{NOW}
local floor, max, min = math.floor, math.max, math.min
local ingress, a = ARGV[1], {{}}
for i = 2, #ARGV do a[i] = tonumber(ARGV[i]) end
local sequence, requests, tokens, in_flight, slots = a[2], a[3], a[4], a[5], a[6]
local limit = {{requests = a[7], tokens = a[8], in_flight = a[9], day = a[10], month = a[11]}}
local known = {{generation = a[12], version = a[13], at = a[14], requests = a[15], tokens = a[16], day = a[17],
  month = a[18]}}
local packed = redis.call('GET', KEYS[1])
local s = {{generation = 0, version = 0, day = 0, month = 0, day_tokens = 0, month_tokens = 0, requests = {{}},
  tokens = {{}}, base = {{requests = 0, tokens = 0, day = 0, month = 0}}, members = {{}}}}
if packed then s = cmsgpack.unpack(packed) end

local function total(counts)
  local sum = 0
  for _, amount in pairs(counts) do sum = sum + amount end
  return max(0, sum)
end
local function month_start(day)
  local era_day = (day + 719468) % 146097
  local year = floor((era_day - floor(era_day / 1460) + floor(era_day / 36524) - floor(era_day / 146096)) / 365)
  local year_day = era_day - (365 * year + floor(year / 4) - floor(year / 100))
  return day - (year_day - floor((153 * floor((5 * year_day + 2) / 153) + 2) / 5))
end
local function add(second, requests, tokens)
  if second > now - {WINDOW_S} then
    for name, amount in pairs({{requests = requests, tokens = tokens}}) do
      local sum = (s[name][second] or 0) + amount
      if sum == 0 then s[name][second] = nil else s[name][second] = sum end
    end
  end
  local day = floor(second / {DAY_S})
  if day == s.day then s.day_tokens = max(0, s.day_tokens + tokens) end
  if day >= s.month then s.month_tokens = max(0, s.month_tokens + tokens) end
end

local day = floor(now / {DAY_S})
local month = month_start(day)
if day > s.day then s.day_tokens = 0 s.base.day = 0 end
if month > s.month then s.month_tokens = 0 s.base.month = 0 end
s.day, s.month = day, month
for _, name in ipairs({{'requests', 'tokens'}}) do
  local kept = {{}}
  for second, amount in pairs(s[name]) do
    if second > now - {WINDOW_S} then
      local at = min(second, now)
      kept[at] = (kept[at] or 0) + amount
    end
  end
  s[name] = kept
end
local members = {{}}
for name, one in pairs(s.members) do
  if now - one[2] < {MEMBER_S} then
    one[2] = min(one[2], now)
    members[name] = one
  end
end
s.members = members

if s.generation == 0 or (known.generation == s.generation and known.version > s.version) then
  s.generation = now_us
  s.base = {{requests = total(s.requests), tokens = total(s.tokens), day = s.day_tokens, month = s.month_tokens}}
end
if known.generation ~= 0 and known.generation ~= s.generation then
  local second = min(known.at, now)
  local known_day = floor(second / {DAY_S})
  if second > now - {WINDOW_S} then
    for _, name in ipairs({{'requests', 'tokens'}}) do
      local more = known[name] - s.base[name]
      if more > 0 then
        s[name][second] = (s[name][second] or 0) + more
        s.base[name] = known[name]
      end
    end
  end
  if known_day == s.day and known.day > s.base.day then
    s.day_tokens = s.day_tokens + known.day - s.base.day
    s.base.day = known.day
  end
  if known_day >= s.month and known.month > s.base.month then
    s.month_tokens = s.month_tokens + known.month - s.base.month
    s.base.month = known.month
  end
end

local mine = members[ingress]
if not mine or mine[1] ~= sequence then
  for i = 19, #ARGV, 3 do add(min(a[i], now), a[i + 1], a[i + 2]) end
  if limit.requests > 0 then requests = min(requests, max(0, limit.requests - total(s.requests))) end
  if limit.tokens > 0 then tokens = min(tokens, max(0, limit.tokens - total(s.tokens))) end
  if limit.day > 0 then tokens = min(tokens, max(0, limit.day - s.day_tokens)) end
  if limit.month > 0 then tokens = min(tokens, max(0, limit.month - s.month_tokens)) end
  add(now, requests, tokens)
  mine = {{sequence, now, 0, requests, tokens}}
end
local others = 0
for name, one in pairs(members) do
  if name ~= ingress and now - one[2] < {LAPSE_S} then others = others + one[3] end
end
if limit.in_flight > 0 then slots = max(in_flight, min(slots, limit.in_flight - others)) end
mine[3] = slots
members[ingress] = mine
s.version = s.version + 1

local function first(counts)
  local found = 0
  for second, _ in pairs(counts) do if found == 0 or second < found then found = second end end
  return found
end
local kept_s = {KEPT_S}
if limit.day > 0 or limit.month > 0 then kept_s = {BUDGET_KEPT_S} end
redis.call('SET', KEYS[1], cmsgpack.pack(s), 'EX', kept_s)
return {{s.generation, s.version, now, total(s.requests), total(s.tokens), s.day_tokens, s.month_tokens, mine[2],
  mine[4], mine[5], slots, others + slots, first(s.requests), first(s.tokens)}}
"""
BEAT = f"""
{NOW}
local count = 0
redis.call('HSETNX', KEYS[1], '', now_us)
redis.call('HSET', KEYS[1], ARGV[1], now)
local found = redis.call('HGETALL', KEYS[1])
for i = 1, #found, 2 do
  local age = now - found[i + 1]
  if found[i] == '' then
  elseif age >= {LAPSE_S} or age < -{LAPSE_S} then redis.call('HDEL', KEYS[1], found[i])
  else count = count + 1 end
end
redis.call('EXPIRE', KEYS[1], {BUDGET_KEPT_S})
return {{tonumber(redis.call('HGET', KEYS[1], '')), count}}
"""


class RedisLimits:
    """Counts on one Redis server, for all ingresses of a namespace. Each method raises LimitsUnavailable."""

    def __init__(self, client: redis.Redis, namespace: str = "forebay") -> None:
        self._client = client
        self._prefix = namespace.replace("%", "%25").replace(":", "%3A")
        self._take = client.register_script(TAKE)
        self._beat = client.register_script(BEAT)

    async def take(self, ask: Ask) -> Reply:
        changes = [value for change in ask.changes for value in change]
        amounts = (ask.sequence, ask.requests, ask.tokens, ask.in_flight, ask.slots)
        args: list[str | int] = [ask.ingress, *amounts, *ask.limits, *ask.known, *changes]
        try:
            found: list[int] = await self._take(keys=[f"{self._prefix}:limits:{ask.key_id}"], args=args)
        except (RedisError, OSError) as error:
            raise LimitsUnavailable(str(error)) from error
        count = len(Known._fields)
        return Reply(Known(*found[:count]), *found[count:])

    async def beat(self, ingress: str) -> tuple[int, int]:
        try:
            generation, count = await self._beat(keys=[f"{self._prefix}:limit-ingresses"], args=[ingress])
        except (RedisError, OSError) as error:
            raise LimitsUnavailable(str(error)) from error
        return generation, count

    async def close(self) -> None:
        await self._client.aclose()
