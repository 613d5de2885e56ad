"""Planning: from a request and rates to a Plan, by searches."""
