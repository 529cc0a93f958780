"""What will happen: step time, memory, one step event by event, a whole run with failures."""

PRODUCT = "headway"
