r"""Remove the units after and before a number, by a table: `12\text{ cm}`, `4 km/h`, `90^\circ`, `\$5`, `4 people`.

A word that is not in the table is no unit: `4 \text{ is wrong}` is not 4. The words after the number of a gold answer
also count as units in the answers to that prompt.

One letter alone (`m`, `s`) is a unit only where it stands upright (`\text{m}`, `\mathrm{m}`) or in a ratio (`4 m/s`):
elsewhere it is a variable.
"""

from __future__ import annotations

import re
from collections.abc import Set


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text, which are separated by white space."""
    return frozenset(text.split())


_PREFIXES = ("", "k", "M", "G", "T", "c", "d", "m", "\u00b5", "\u03bc", "n", "p")
_PREFIXED = words_of("g m s l L J W N V A Pa Hz eV cal K mol bar B bit \u03a9")
_SHORT = {prefix + unit for unit in _PREFIXED for prefix in _PREFIXES} | words_of(
    """
    h C F T H lb lbs oz ft in yd mi mph kph rpm ha hr hrs min mins sec secs deg rad sr atm erg ergs dyn dyne u AU pc ly
    Wh kWh mAh dB ppm cc fps bpm \u212b \u00c5
    """
)
"""Short forms of units: case matters (`mW` is not `MW`), and there is no plural."""
_LONG = words_of(
    """
    usd eur gbp jpy cny rmb inr cad aud chf dollar euro pound yen yuan rupee peso cent penny pennies pence nickel
    dime quarter meter metre centimeter centimetre millimeter millimetre kilometer kilometre inch foot feet yard
    mile micrometer nanometer gram kilogram milligram ton tonne ounce liter litre milliliter millilitre gallon quart
    pint cup tablespoon teaspoon acre hectare second minute hour day week month year decade century centuries
    millisecond microsecond degree radian celsius fahrenheit kelvin joule kilojoule watt kilowatt megawatt newton
    volt ampere amp ohm hertz kilohertz megahertz pascal kilopascal mole calorie kilocalorie bit byte kilobyte
    megabyte gigabyte knot lightyear angstrom coulomb farad henry tesla weber lumen lux candela electronvolt
    steradian unit people person child children man men woman women boy girl student teacher kid adult friend player
    worker employee member guest passenger customer visitor soldier couple family families team group class
    classroom school apple orange banana pear peach lemon mango strawberry strawberries cherry cherries grape egg
    cookie cake cupcake pie pizza slice candy candies chocolate sandwich burger muffin bagel donut tomato potato
    carrot onion flower rose tulip tree plant leaf leaves seed dog cat puppy puppies kitten horse cow pig sheep goat
    chicken duck bird fish animal rabbit turtle frog spider ant bee butterfly butterflies monkey elephant lion book
    page chapter letter word sentence line sheet notebook magazine newspaper pen pencil crayon marker eraser sticker
    card stamp coin bill marble ball balloon toy doll game puzzle piece block bead button ribbon car bus truck bike
    bicycle train plane boat ship wheel tire seat ticket house room door window floor table chair desk bed lamp
    brick tile box bag basket bottle jar can glass bucket barrel carton crate pack package pile bowl plate spoon
    fork shirt sock shoe hat dress pair clip item thing object point goal run vote question problem digit number
    integer prime factor divisor multiple value solution term element subset set triple triangle rectangle circle
    edge face vertex vertices diagonal step stair lap trip round time way path route color colour combination
    permutation arrangement outcome possibility possibilities handshake function sequence string phone computer
    photo picture song movie video lesson
    """
)
"""Long forms of units, and things that are counted, in the singular; case does not matter."""
_ONLY_PLURAL = words_of("squares cubes roots")
_MODIFIERS = words_of("square cubic sq cu old each")
_MONEY = r"(?:\\\$|\$|[\u20ac\u00a3\u00a5\u20b9\u20a9]|US\\\$|\\euro(?![A-Za-z])|(?:USD|EUR|GBP|Rs)(?![A-Za-z])\.?)"
_BEFORE = re.compile(rf"([+-]?)\s*(?:\\text\s*\{{\s*{_MONEY}\s*\}}|{_MONEY})\s*(?=[-+0-9.\\])")
_TOKEN = re.compile(
    rf"""(?P<font>\\(?:text|textrm|textnormal|mathrm|mbox|rm)\s*\{{(?P<inner>[^{{}}]*)\}})
    |(?P<frac>\\[dt]?frac\s*\{{(?P<over>[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)?)\}}\s*\{{(?P<under>[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)?)\}})
    |(?P<degree>\^\s*\{{?\s*\\circ(?![A-Za-z])\s*\}}?|\\degree(?![A-Za-z]))
    |(?P<money>{_MONEY})
    |(?P<gap>(?:\s|~|\\[,;:!\ ]|\\q?quad(?![A-Za-z]))+)
    |(?P<ratio>/|\\cdot(?![A-Za-z])|\*|\u00b7|(?<![A-Za-z])per(?![A-Za-z]))
    |(?P<power>\^\s*(?:\{{\s*-?[0-9]\s*\}}|-?[0-9]))
    |\\(?P<command>[A-Za-z]+)
    |(?P<word>[^\W\d_]+\.?)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_FONT_ALONE = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|cis)(?![A-Za-z])|\b(?:sin|cos|tan|cot|sec|csc|cis)\b")
_NUMBER_END = re.compile(r"[0-9.)}\]]$")
_NONE: frozenset[str] = frozenset()


def without_unit(text: str, more: Set[str] = _NONE) -> str:
    """Return a number or formula without the unit after it and the currency before it.

    Args:
        more: further words, in lower case, that count as units.
    """
    text = _BEFORE.sub(r"\1", text, count=1) if _BEFORE.match(text) else text
    tokens = list(_TOKEN.finditer(text))
    at = len(tokens)
    while at > 0 and _may_belong(tokens, at - 1, more):
        at -= 1
    while at < len(tokens) and tokens[at].lastgroup in ("gap", "power"):
        at += 1  # it belongs to the number
    unit = tokens[at:]
    # spaces, slashes, powers and modifiers are no unit without a word or sign
    counted = [token for token in unit if token.lastgroup not in ("gap", "ratio", "power")]
    modifiers = _MODIFIERS - more
    if all(token.lastgroup == "word" and token["word"].rstrip(".").lower() in modifiers for token in counted):
        return text
    head = text[: unit[0].start()]
    stem = re.sub(r"(?:\s|~|\\[,;:! ])+$", "", head)
    # `4/m` is a division, and a text that is nothing but a unit keeps it
    if (unit[0].lastgroup == "ratio" and unit[0][0] != "per") or not stem:
        return text
    # a bare word after anything but a number may be a variable
    if unit[0].lastgroup == "word" and _NUMBER_END.search(stem) is None:
        return text
    # in `\sin 90^\circ` the degree sign is part of the value
    if any(token.lastgroup == "degree" for token in unit) and _TRIGONOMETRY.search(stem) is not None:
        return text
    return stem


def is_unit_word(word: str, more: Set[str] = _NONE) -> bool:
    """Return whether a word is a unit, or qualifies one (`square`)."""
    word = word.rstrip(".")
    small = word.lower()
    if word in _SHORT or small in _ONLY_PLURAL or small in _MODIFIERS:
        return True
    return any(
        singular in _LONG or singular in more for singular in (small, small.removesuffix("s"), small.removesuffix("es"))
    )


def _may_belong(tokens: list[re.Match[str]], at: int, more: Set[str]) -> bool:
    token = tokens[at]
    match token.lastgroup:
        case "gap" | "ratio" | "power" | "degree" | "money":
            return True
        case "word":
            word = token["word"].rstrip(".")
            before = tokens[at - 1].lastgroup if at > 0 else None
            behind = tokens[at + 1].lastgroup if at + 1 < len(tokens) else None
            # a letter may be `h` of `km/h`, `C` of a degree, or `m` of `5 m/s`
            is_in_ratio = before in ("ratio", "degree") or (before == "gap" and behind == "ratio")
            return is_unit_word(word, more) and (len(word) > 1 or word.lower() in more or is_in_ratio)
        case "font":
            return _is_unit(token["inner"], more)
        case "frac":
            sides = [_FONT_ALONE.fullmatch(token[side].strip()) for side in ("over", "under")]
            return all(side is not None and _is_unit(side[1], more) for side in sides)
        case _:
            return False


def _is_unit(upright: str, more: Set[str]) -> bool:
    """Return whether a text in upright letters is a unit and nothing else."""
    tokens = list(_TOKEN.finditer(upright))
    words = [token["word"] for token in tokens if token.lastgroup == "word"]
    if any(token.lastgroup in ("command", "other", "font", "frac") for token in tokens):
        return False
    if not all(is_unit_word(word, more) for word in words):
        return False
    return any(word.rstrip(".").lower() not in _MODIFIERS for word in words) or any(
        token.lastgroup in ("degree", "money") for token in tokens
    )
