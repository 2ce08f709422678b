"""Pages and charts that need nothing beside them."""
