"""The planner of a namespace, and the actuators that execute its decisions. They meet on the topic `scaling`."""
