"""What to choose: every legal layout, its cost, and the plan with its reasons."""

PRODUCT = "headway"
