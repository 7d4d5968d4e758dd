import numpy as np

weight = np.zeros(8)
for _ in range(3):
    weight -= 0.1 * np.random.normal(size=8)
print(weight)
