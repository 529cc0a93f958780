"""What is: units, documents, hardware, fabrics, storage and clusters."""

PRODUCT = "headway"
