"""The cells of a comparison, and the runs behind them."""
