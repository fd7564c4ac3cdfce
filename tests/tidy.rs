//! The walls of the house.
