"""Data: hardware, models, measurements. Loaders only."""
