"""Proof that a schedule can be executed, or an error that names the operation at fault."""
