"""Published measurements as configurations, and figures of how well a plan predicts them."""
