"""The formats that are enforced, as patterns. All others are annotations, as JSON Schema has it by default.

Each accepts only valid values; rare valid spellings (quoted local parts of addresses, leap seconds) are left out.
"""

from __future__ import annotations

_YEAR = r"[0-9]{4}"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,30}"
_NAME = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,19}"
_HEX = r"[0-9a-fA-F]{1,4}"
_LAST = rf"(?:{_HEX}:{_HEX}|(?:{_OCTET}\.){{3}}{_OCTET})"  # the last 32 bits of an IPv6 address
_SHORT = "|".join(  # an address with `::`, by the groups that follow it
    [rf"(?:(?:{_HEX}:){{0,{4 - n}}}{_HEX})?::(?:{_HEX}:){{{n}}}{_LAST}" for n in range(5)]
    + [rf"::(?:{_HEX}:){{5}}{_LAST}", rf"(?:(?:{_HEX}:){{0,5}}{_HEX})?::{_HEX}", rf"(?:(?:{_HEX}:){{0,6}}{_HEX})?::"]
)
_PATH = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2})"

FORMATS = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}T{_TIME}$",
    "uuid": r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "ipv4": rf"^(?:{_OCTET}\.){{3}}{_OCTET}$",
    "ipv6": rf"^(?:(?:{_HEX}:){{6}}{_LAST}|{_SHORT})$",
    "hostname": rf"^{_NAME}(?:\.{_NAME}){{0,5}}$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*$",
    "uri": rf"^[A-Za-z][A-Za-z0-9+.-]*:{_PATH}*(?:#{_PATH}*)?$",
}
