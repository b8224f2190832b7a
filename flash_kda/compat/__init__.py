"""The interfaces of other KDA libraries, mapped onto this one: ``flashkda`` (FlashKDA's own) and ``fla`` (FLA's)."""
