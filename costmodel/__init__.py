"""What a training step costs: types, formulas and simulation. Imports no torch."""
