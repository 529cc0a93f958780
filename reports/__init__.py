"""What is told: comparison of promise and measurement, charts, HTML reports."""

PRODUCT = "headway"
