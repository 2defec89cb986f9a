"""What a person uses: commands, search, explanations and exports."""
