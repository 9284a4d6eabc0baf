"""Plans of MoE layers: dispatch of rows, time of a layer, and which ranks hold which experts."""
