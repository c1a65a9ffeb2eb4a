"""Results of the product that a change of its shape must not change, stored beside this file."""
