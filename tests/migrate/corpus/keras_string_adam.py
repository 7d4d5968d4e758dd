import numpy as np
from keras.layers import Dense, Dropout
from keras.models import Sequential

np.random.seed(7)
X = np.random.rand(1000, 8) - 0.5
Y = (X[:, 0] + X[:, 3] > X[:, 5]).astype(int)

model = Sequential()
model.add(Dense(24, activation='relu'))
model.add(Dropout(0.1))
model.add(Dense(1, activation='sigmoid'))
model.compile(loss='binary_crossentropy', optimizer='adam', metrics=['accuracy'])
model.fit(X[:700], Y[:700], epochs=15, batch_size=10, verbose=0)
scores = model.evaluate(X[700:], Y[700:], verbose=0)
print("accuracy %.3f" % scores[1])
model.save_weights("model.weights.h5")
