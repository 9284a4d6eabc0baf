"""Expert replicas of a stage."""
