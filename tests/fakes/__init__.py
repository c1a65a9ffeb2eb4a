"""Stand-ins that we own for what a test cannot have: real servers, clearly named as fakes."""
